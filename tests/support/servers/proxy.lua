-- The fate of each request (or TCP connection), by what FOLDER/faults says now: "latency_ms fail reset hole methods".
-- It is noted in FOLDER/requests before the request goes on.
local folder = os.getenv("PROXY_FOLDER")
math.randomseed(tonumber(os.getenv("PROXY_SEED")))

local function faults()
  local file = io.open(folder .. "/faults")
  if not file then return 0, 0, 0, 0, "*" end
  local latency, fail, reset, hole = file:read("n", "n", "n", "n")
  local methods = file:read("l"):gsub("^%s+", "")
  file:close()
  return latency, fail, reset, hole, methods
end

local function decide(txn, method, path, agent)
  local latency, fail, reset, hole, methods = faults()
  local meant = methods == "*" or ("," .. methods .. ","):find("," .. method .. ",", 1, true)
  local dice, fate = math.random(), "pass"
  if not meant then fate = "pass"
  elseif hole == 1 then fate = "hole"
  elseif dice < fail then fate = "fail"
  elseif dice < fail + reset then fate = "reset" end
  local log = io.open(folder .. "/requests", "a")
  log:write(method, "\t", path, "\t", agent, "\t", fate, "\n")
  log:close()
  if latency > 0 then core.msleep(latency) end
  while fate == "hole" and select(4, faults()) == 1 do core.msleep(100) end
  txn:set_var("txn.fate", fate == "hole" and "reset" or fate)
end

core.register_action("http_fate", {"http-req"}, function(txn)
  local agent = txn.http:req_get_headers()["user-agent"]
  decide(txn, txn.f:method(), txn.f:pathq(), agent and agent[0] or "")
end)

core.register_action("tcp_fate", {"tcp-req"}, function(txn) decide(txn, "TCP", "", "") end)
