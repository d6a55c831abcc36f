"""The token ledger: what each term of the loss contributed at each token."""
