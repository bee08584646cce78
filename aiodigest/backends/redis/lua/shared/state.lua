-- state: where a timeline is.
--
-- Needs    keys

-- Return the name of the set that holds a timeline and its score there, or nothing.
local function state_of(key)
  for _, state in ipairs({'ready', 'leased', 'waiting'}) do
    local due = call('ZSCORE', tag .. state, key)
    if due then
      return state, tonumber(due)
    end
  end
end
