#pragma once

// See ../context.h: ProcessGroupGloo.hpp includes this header and uses nothing of it.
