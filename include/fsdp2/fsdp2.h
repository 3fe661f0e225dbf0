#pragma once

// Everything that a training program needs.

#include <fsdp2/check_parity.h>
#include <fsdp2/clip_grad.h>
#include <fsdp2/dcp/app_state.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/dcp/manager.h>
#include <fsdp2/dcp/state_dict.h>
#include <fsdp2/dcp/storage.h>
#include <fsdp2/dcp/value.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/diagnose.h>
#include <fsdp2/error.h>
#include <fsdp2/fake_backend.h>
#include <fsdp2/fully_shard.h>
#include <fsdp2/grad_scaler.h>
#include <fsdp2/log.h>
#include <fsdp2/lr_scheduler.h>
#include <fsdp2/meta_init.h>
#include <fsdp2/module.h>
#include <fsdp2/optim.h>
#include <fsdp2/policy.h>
#include <fsdp2/process_group.h>
#include <fsdp2/rng_state.h>
#include <fsdp2/sample_cursor.h>
#include <fsdp2/sequential.h>
#include <fsdp2/tensor/dtensor.h>
#include <fsdp2/tensor/placement.h>
#include <fsdp2/version.h>
