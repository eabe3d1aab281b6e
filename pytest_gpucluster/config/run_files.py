"""The names in the results directory of a run. Agents read them before torch; imports nothing."""

RESULTS_DIR = "gpucluster-results"
"""The directory, unless said."""
JOURNAL, RESULTS = "journal.jsonl", "results.json"
REPORT, METRICS, JUNIT = "report.html", "metrics.prom", "junit.xml"
LOGS = "logs"
RUN_FILES = (JOURNAL, RESULTS, REPORT, METRICS, JUNIT, LOGS)
"""All that a run writes there."""
