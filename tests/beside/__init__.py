"""The library beside other packages: the built wheel on old and new releases, other apps, drivers and web servers."""
