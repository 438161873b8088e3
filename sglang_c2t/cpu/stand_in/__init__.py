"""A folder for ``sys.path``: it holds a stand-in for a package that cannot be imported here."""
