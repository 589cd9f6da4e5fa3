"""What a run leaves behind and shows: metrics, sample dumps, the terminal, the log, the HTML report, and first-step guards.

observer.Observer ties them together for the loop; report.write_report reads a run directory and needs nothing else.
"""
