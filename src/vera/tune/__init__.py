"""`vera tune`: cache settings for a machine, a model and a kind of work, found by measuring."""
