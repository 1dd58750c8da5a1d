# Completion of quantexp in fish: quantexp completion fish | source
function __quantexp_complete
    set -l found (quantexp __complete (commandline -cp | string collect) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
        return
    end
    set -l token (commandline -ct)
    set -l key (string match -r '^.*=' -- $token)
    __fish_complete_path (string replace -r '^.*=' '' -- $token) | string replace -r '^' "$key"
end
complete -c quantexp -f -a '(__quantexp_complete)'
