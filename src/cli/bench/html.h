#pragma once
// Report of the bench as one self-contained page: no script, no network.

#include <nlohmann/json.hpp>
#include <string>

namespace shoal::cli {

// report: the output of `shoal bench --json`, with "collectives" or "train". Returns well-formed XHTML with inline SVG
// plots.
std::string html_report(const nlohmann::ordered_json& report);

}  // namespace shoal::cli
