"""What a run will need before it starts: memory, time and cost, from only its configuration and the model's config.json."""
