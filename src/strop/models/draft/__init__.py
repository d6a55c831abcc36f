"""Draft heads of a policy (EAGLE-3): what proposes tokens that the policy then verifies."""
