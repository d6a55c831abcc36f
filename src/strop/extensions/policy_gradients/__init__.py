"""Policy gradients with other baselines and credit, and with a choice of tokens by their entropy."""
