"""The thread that runs models: takes jobs, runs what the scheduler picks, sends events."""
