"""Losses and the objective that a training minimises."""

from train.objectives.ranking import HINGES, ranking_loss
from train.objectives.terms import Inputs, Objective, gather

__all__ = ["HINGES", "Inputs", "Objective", "gather", "ranking_loss"]
