"""All rules on the same recorded drafts: what TABLES.md, VARIANTS.md and TREES.md say."""
