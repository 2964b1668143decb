"""The thread that runs models: takes jobs, plans and runs calls, sends events."""
