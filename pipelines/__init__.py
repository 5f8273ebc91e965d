"""The foreman: reads flows.yaml, plans, gives orders to workers, keeps the books."""
