"""The guides as a site, and what its pages show."""
