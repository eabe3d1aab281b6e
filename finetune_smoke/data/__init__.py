"""Rows: generated calls or real texts, tokenised, cached and loaded in the background."""
