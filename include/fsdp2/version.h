#pragma once

// Read by CMake: keep the three lines in this form.
#define FSDP2_VERSION_MAJOR 0
#define FSDP2_VERSION_MINOR 1
#define FSDP2_VERSION_PATCH 0
