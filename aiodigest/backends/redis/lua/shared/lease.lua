-- lease: open digests under leases.
--
-- Needs    clock budget timelines

local INLINE_BYTES = 262144
local room_entries, room_bytes = SLICE, INLINE_BYTES -- for the entries that one answer may hold

-- Return the first entries of a list, as many as there is room for; read a few at a time, since a value may be large.
local function inline(list, length)
  local entries, number = {}, 0
  while number < length and room_entries > 0 do
    local page = call('LRANGE', list, number, math.min(number + 32, number + room_entries, length) - 1)
    if #page == 0 then
      break
    end
    for index = 1, #page do
      room_bytes = room_bytes - #page[index]
      if room_bytes < 0 then
        room_entries = 0
        return entries
      end
      number = number + 1
      entries[number] = page[index]
    end
    room_entries = room_entries - #page
  end
  return entries
end

-- Take the records out of a log that were delivered already, and are not to be delivered again.
local function leave_out(held, ttl)
  -- Needs    entries lists seen
  local log, rest = logs .. held.key, {}
  local kept = collect({}, {}, log, held.logged)
  local seen = which_seen(held.key, kept, 1, #kept)
  for index, entry in ipairs(kept) do
    if not seen[index] then
      rest[#rest + 1] = entry
    end
  end
  if #rest < #kept then
    uncount(held)
    rewrite(log, rest, #rest, lifetime(held, ttl))
    held.logged = #rest
    try('HINCRBY', layout, 'duplicates', #kept - #rest)
  end
end

-- Open the log as a new digest, or merge it into one that failed; either way the contents are new.
local function fold(held, limits, digest_id)
  local log, open = logs .. held.key, opens .. held.key
  local merging = held.id ~= nil or held.opened > 0 -- the records of a digest whose name is gone are kept
  local size = held.opened + held.logged
  uncount(held)
  held.id = digest_id
  held.part = limits.max_size
  held.cut = limits.max_age > 0 and now - shift - limits.max_age or 0
  if merging or size > limits.capacity or (limits.max_size > 0 and size > limits.max_size) then
    -- Needs    entries lists
    local seen = {}
    local kept = collect(collect({}, seen, log, held.logged), seen, open, held.opened)
    local left = math.min(#kept, limits.capacity)
    if merging or left < size then
      rewrite(open, kept, left, lifetime(held, limits.ttl))
      call('UNLINK', log)
    else
      call('RENAME', log, open)
    end
    if #kept > left then
      held.dropped = held.dropped + #kept - left
      try('HINCRBY', layout, 'dropped', #kept - left)
    end
    size = left
  else
    call('RENAME', log, open)
  end
  held.open_dropped = held.open_dropped + held.dropped
  held.dropped, held.logged, held.opened, held.next = 0, 0, size, 0
end

-- Return whether the last lease on a timeline's digest, or one before, ended without a word.
local function is_doubtful(held)
  return held.token ~= nil or held.lost > 0
end

-- Lease a timeline; return the fields of `aiodigest.backend.Lease`, or nothing if all of it was delivered already.
local function take(held, due, lease, limits, token, bound)
  local key = held.key
  limits = held.own and parse_limits(held.own) or limits
  if held.token then
    held.frozen = '1' -- nobody knows what became of the last attempt, which is charged if it ran alone
    held.attempts = held.attempts + (held.lost >= ALONE and 1 or 0)
    held.lost = held.lost + 1
  end
  if not held.id or (held.logged > 0 and not held.frozen) then
    local needs = held.needs
    if needs and string.find(needs, 'dedupe', 1, true) then
      leave_out(held, limits.ttl)
      if held.logged + held.opened == 0 then
        held.flush, held.pass = nil, nil
        go_idle(held)
        call('ZREM', ready, key)
        call('ZREM', leased, key)
        save(held, FIELDS)
        return
      end
    end
    fold(held, limits, token)
    if needs then
      bound, held.bytes = held.max_bytes > 0 and math.min(bound, held.max_bytes) or bound, 0
    end
    held.bound = bound ~= DIGEST_BYTES and bound or 0
  end
  held.token = token
  touch(held, limits.ttl)
  call('ZREM', ready, key)
  call('ZADD', leased, now + lease, key)
  save(held, FIELDS)
  return {
    key, token, held.id, held.attempts + 1, held.iteration + 1, held.open_dropped, due, held.opened, held.part, held.cut,
    held.error or '', held.lost, held.bound > 0 and held.bound or DIGEST_BYTES, held.own or '',
    held.pass and 1 or 0, inline(opens .. key, held.opened),
  }
end
