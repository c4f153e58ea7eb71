"""What optimizers and gradient scaling call: functions of lists, fused steps."""
