"""What tests of several rooms share: waiting, workers in threads and in processes, fixtures."""
