"""How fast, on this machine: `make bench`. Every figure stands beside a probe of the machine itself."""
