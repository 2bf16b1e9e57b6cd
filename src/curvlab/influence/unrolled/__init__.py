"""Derivatives of a whole training run by the weights of its examples, exact and by segments."""

from curvlab.influence.unrolled.response import UnrolledResponse, unrolled_response
from curvlab.influence.unrolled.segments import SegmentResponse, segment_response

__all__ = ["SegmentResponse", "UnrolledResponse", "segment_response", "unrolled_response"]
