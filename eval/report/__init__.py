"""The benchmark's report: numbers of a run, tables and plots of them, and their two renderings."""
