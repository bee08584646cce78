-- flushing: let a timeline be due now, or after the delivery under way, unless it is muted.
--
-- Needs    state schedule mutes

-- Flush a timeline, whose digest then passes its hours. Return the state that it had, if it may be flushed, and whether it
-- has become ready.
local function flush(key)
  local state, due = state_of(key)
  if state == 'muted' or (mute_of(key) or 0) > now then
    return nil, false
  end
  if state and type(try('HGET', metas .. key, 'end')) == 'string' then -- else it is broken, and the claim will say so
    call('HSET', metas .. key, state == 'leased' and 'flush' or 'pass', '1')
  end
  if state ~= 'waiting' then
    return state, false
  end
  due = tonumber(call('ZSCORE', postponed, key)) or due
  call('ZREM', postponed, key)
  return state, place(key, math.min(due, now), true)
end
