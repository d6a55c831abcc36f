"""An index of stored rollouts by their scalars, which avoids reading their texts."""
