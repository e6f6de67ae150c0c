"""`vera demo-ops`: a service under load, a rollout that is promoted, one that is rolled back, and the degrade switch.

What an operator would type is really run, as commands of their own; see docs/operations.md.
"""
