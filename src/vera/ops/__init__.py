"""What operations load into their own tools: `grafana.json`, a dashboard, and `alerts.yml`, Prometheus' alert rules.

The formulas in both are those of `vera.metrics.registry`.
"""
