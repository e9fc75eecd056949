#pragma once
// The bench's report as one page that needs nothing else: no script, no network.

#include <nlohmann/json.hpp>
#include <string>

namespace shoal::cli {

// `report`: what `shoal bench --json` writes, with "collectives" or "train". Well-formed XHTML with inline SVG plots.
std::string html_report(const nlohmann::ordered_json& report);

}  // namespace shoal::cli
