"""Training of OT-Transformers: models, ODE integration, objective, data, recipes, evaluation."""
