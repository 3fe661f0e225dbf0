#pragma once

/// Symbols are hidden by default; FSDP2_API marks what users may link against.
#define FSDP2_API __attribute__((visibility("default")))
