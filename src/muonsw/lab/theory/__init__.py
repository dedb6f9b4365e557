"""The paper's theory as closed forms: pure functions that state and check their hypotheses.

`lam` is the weight decay lambda, `c` the minimizer and `a` the curvature of the scalar quadratic, `A` the
target of the matrix quadratic, `q = lam / eta_max` the coefficient of scaled decay. A hypothesis that does
not hold raises `HypothesisError`, which names it.
"""

from muonsw.lab.theory.convergence import clip_projection as clip_projection
from muonsw.lab.theory.convergence import constant_decay_fixed_point as constant_decay_fixed_point
from muonsw.lab.theory.convergence import constant_decay_loss_gap as constant_decay_loss_gap
from muonsw.lab.theory.convergence import frozen_point as frozen_point
from muonsw.lab.theory.convergence import muon_loss_floor as muon_loss_floor
from muonsw.lab.theory.convergence import muon_norm_bounds as muon_norm_bounds
from muonsw.lab.theory.convergence import muon_radius as muon_radius
from muonsw.lab.theory.convergence import muon_separation as muon_separation
from muonsw.lab.theory.convergence import scaled_decay_error as scaled_decay_error
from muonsw.lab.theory.hypotheses import HypothesisError as HypothesisError
from muonsw.lab.theory.muon_bounds import alignment_bound as alignment_bound
from muonsw.lab.theory.muon_bounds import convex_gap_bound as convex_gap_bound
from muonsw.lab.theory.muon_bounds import descent_bound as descent_bound
from muonsw.lab.theory.muon_bounds import noise_floor as noise_floor
from muonsw.lab.theory.muon_bounds import shrink_constant as shrink_constant
from muonsw.lab.theory.muon_bounds import tracking_error_bounds as tracking_error_bounds
from muonsw.lab.theory.muon_bounds import tracking_error_limit as tracking_error_limit
from muonsw.lab.theory.robbins_monro import PowerLaw as PowerLaw
from muonsw.lab.theory.robbins_monro import ScheduleReport as ScheduleReport
from muonsw.lab.theory.robbins_monro import check_schedule as check_schedule
from muonsw.lab.theory.sgd_bounds import first_contracting_step as first_contracting_step
from muonsw.lab.theory.sgd_bounds import sa_bound as sa_bound
from muonsw.lab.theory.sgd_bounds import sa_constant as sa_constant
from muonsw.lab.theory.sgd_bounds import stationarity_bound as stationarity_bound
from muonsw.lab.theory.sgd_bounds import strongly_convex_bound as strongly_convex_bound
from muonsw.lab.theory.sgd_bounds import strongly_convex_kappa as strongly_convex_kappa
from muonsw.lab.theory.steady_state import constant_decay_norm_limit as constant_decay_norm_limit
from muonsw.lab.theory.steady_state import next_norm as next_norm
from muonsw.lab.theory.steady_state import next_norm_simplified as next_norm_simplified
from muonsw.lab.theory.steady_state import noise_alignment as noise_alignment
from muonsw.lab.theory.steady_state import noise_norm as noise_norm
from muonsw.lab.theory.steady_state import noise_rotation as noise_rotation
from muonsw.lab.theory.steady_state import relaxation_number as relaxation_number
from muonsw.lab.theory.steady_state import relaxation_time as relaxation_time
from muonsw.lab.theory.steady_state import relaxation_time_fixed_alignment as relaxation_time_fixed_alignment
from muonsw.lab.theory.steady_state import scaled_decay_norm_limit as scaled_decay_norm_limit
from muonsw.lab.theory.steady_state import steady_state_norm as steady_state_norm
from muonsw.lab.theory.tracking import NormHistory as NormHistory
from muonsw.lab.theory.tracking import Tracking as Tracking
from muonsw.lab.theory.tracking import norms_with_memory as norms_with_memory
from muonsw.lab.theory.tracking import predict_norms as predict_norms
from muonsw.lab.theory.tracking import relaxation_times as relaxation_times
from muonsw.lab.theory.tracking import steady_state_norm_with_memory as steady_state_norm_with_memory
from muonsw.lab.theory.tracking import target_norms as target_norms
from muonsw.lab.theory.tracking import track as track
from muonsw.lab.theory.tracking import tracking_break as tracking_break
