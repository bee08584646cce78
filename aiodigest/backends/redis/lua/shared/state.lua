-- state: where a timeline is.
--
-- Needs    keys

-- Return the name of the set that holds a timeline and its score there; 'muted' and when it was due, if a mute keeps its
-- records out of all of them; or nothing.
local function state_of(key)
  for _, state in ipairs({'ready', 'leased', 'waiting'}) do
    local due = call('ZSCORE', tag .. state, key)
    if due then
      return state, tonumber(due)
    end
  end
  local due = has_mutes and try('HGET', metas .. key, 'due')
  if type(due) == 'string' then
    return 'muted', tonumber(due)
  end
end
