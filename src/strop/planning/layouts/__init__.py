"""The layouts that a plan can choose: what there is, how long each takes, and which are shown."""
