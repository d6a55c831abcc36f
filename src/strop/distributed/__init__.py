"""Run learners, engines, teachers and environments in Ray actors, on one machine or many."""
