"""The scales in grad_scaler_test.cpp's without_hysteresis_it_is_torch_amps."""

import torch

scaler = torch.amp.GradScaler("cpu", init_scale=16, growth_interval=3)
scales = []
for found in (False, True, False, False, False, True, True):
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler.scale(weight * (float("inf") if found else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
print(scales)
