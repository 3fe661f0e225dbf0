#pragma once

#include <fsdp2/dcp/dcp.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <vector>

#include "dcp/exchange.h"
#include "dcp/save_items.h"
#include "dcp/write_files.h"

namespace fsdp2::dcp::detail {

/// The ranks of `exchange` together write what `make_items` gives on each of them; its errors reach all ranks too.
Metadata run_save(const Exchange& exchange, const std::function<std::vector<SaveItem>()>& make_items,
                  const std::filesystem::path& path, const SaveOptions& options, WriteProgress* progress);

/// Waits for the save in the background, if there is one, and throws its error unless a future has thrown it.
void finish_async_save();

}  // namespace fsdp2::dcp::detail
