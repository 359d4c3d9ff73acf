"""What operators wait for, with 1,000,000 pending and 300,000 settled rows: `python -m benchmarks.pages`."""
