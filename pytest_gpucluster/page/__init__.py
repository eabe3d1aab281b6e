"""What people hold in their hands: the page that is signed, the summary in Markdown, the metrics. All made from results.json."""
