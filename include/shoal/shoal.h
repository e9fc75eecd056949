#pragma once
// Everything: #include <shoal/shoal.h>

#include "shoal/base/error.h"
#include "shoal/comm/agree.h"
#include "shoal/comm/call_log.h"
#include "shoal/comm/coalesce.h"
#include "shoal/comm/group.h"
#include "shoal/comm/once_buffer.h"
#include "shoal/comm/world.h"
#include "shoal/layout/flat_layout.h"
#include "shoal/layout/partition.h"
#include "shoal/layout/range.h"
#include "shoal/layout/slice.h"
#include "shoal/optim/fused_adamw.h"
#include "shoal/strategy/ddp.h"
