"""Losses and the objective that a training minimises."""

from train.objectives.diversity import diversity_loss
from train.objectives.ranking import HINGES, ranking_loss
from train.objectives.terms import Inputs, Objective, Term, Views, terms_of

__all__ = ["HINGES", "Inputs", "Objective", "Term", "Views", "diversity_loss", "ranking_loss", "terms_of"]
