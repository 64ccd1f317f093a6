"""Jobs that outlive the dashboard: a folder and a keeper per job, no daemon."""
