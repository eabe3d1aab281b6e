"""What people hold in their hands: the page that is signed, the summary, the metrics. All are made from results.json."""
