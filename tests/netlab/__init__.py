"""Runs over networks that are really slow, cut or lossy: hosts are network namespaces, ranks talk gloo."""
