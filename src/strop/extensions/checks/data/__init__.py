"""What `strop data check` does: it reads the data of a configuration as the run would, without a model."""
