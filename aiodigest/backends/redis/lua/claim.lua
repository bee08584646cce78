-- claim: recover ended leases, promote what is due, and open digests, the oldest due first.
--
-- ARGV[3]  how many digests to open (at most 100 a call)
-- ARGV[4]  lease, ms
-- ARGV[5]  limits of the engine: "capacity max_size max_age ttl", ms
-- ARGV[6]  nonce for the names of tokens and digests
-- Returns  now; how long until something is due, ms (-1: nothing is held); id of the doorbell's last ring; leases;
--          broken timelines (key, error, ...); expired timelines (key, number of records, ...)

call('PERSIST', layout) -- a write that needs no memory: after it a full server lets this script drain it

local slots, lease, limits, nonce = math.min(tonumber(ARGV[3]), 100), tonumber(ARGV[4]), parse_limits(ARGV[5]), ARGV[6]
local leases, broken, expired = {}, {}, {}
-- Read before anything is taken. If another program has written it, nobody is woken, and all is delivered all the same.
local bell = try('XREVRANGE', tag .. 'wake', '+', '-', 'COUNT', 1)[1]

local function expire(held)
  local key, seen = held.key, {}
  local records = collect(collect({}, seen, log_of(key), held.logged), seen, open_of(key), held.opened)
  call('ZREM', ready, key)
  call('UNLINK', log_of(key), open_of(key), meta_of(key))
  count('expired', #records)
  return #records
end

local function set_aside(key, problem)
  call('ZREM', ready, key)
  call('ZADD', waiting, now + lease, key)
  broken[#broken + 1] = key
  broken[#broken + 1] = problem
end

local hold = watch_gap(lease)
if now >= hold then
  promote(leased, now)
end
promote(waiting, now)

local looked = 0
while #leases < slots and looked < SLICE and scanned < SLICE do
  -- whatever is looked at leaves the set, so the next candidates are always its first
  local candidates = call('ZRANGE', ready, 0, slots - #leases - 1, 'WITHSCORES')
  if #candidates == 0 then
    break
  end
  for index = 1, #candidates, 2 do
    if scanned >= SLICE then
      break
    end
    local key, due = candidates[index], tonumber(candidates[index + 1])
    local held, problem = load_all(key)
    looked = looked + 1
    if not held then
      set_aside(key, problem)
    elseif held.logged + held.opened == 0 or held['end'] > 0 and held['end'] <= now then -- 0: its meta is not here
      expired[#expired + 1] = key
      expired[#expired + 1] = expire(held)
    else
      leases[#leases + 1] = take(held, due, lease, limits, nonce .. '-' .. (#leases + 1))
    end
  end
end

local wait = -1
if call('ZCARD', ready) > 0 then
  wait = 0
else
  local next_due = tonumber(call('ZRANGE', waiting, 0, 0, 'WITHSCORES')[2])
  local next_end = tonumber(call('ZRANGE', leased, 0, 0, 'WITHSCORES')[2])
  if next_due or next_end then
    wait = math.max(0, math.min(next_due or math.huge, next_end and math.max(next_end, hold) or math.huge) - now)
  end
end
write_counts()
return {now, wait, bell and bell[1] or '0-0', leases, broken, expired}
