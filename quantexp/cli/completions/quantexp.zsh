#compdef quantexp
# Completion of quantexp in zsh: eval "$(quantexp completion zsh)", after compinit
_quantexp() {
    local line text about
    local -a whole whole_shown open open_shown
    for line in ${(f)"$("${words[1]}" __complete "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"}; do
        text=${line%%$'\t'*} about=${line#*$'\t'}
        if [[ $text == *[=.] ]]; then
            open+=("$text") open_shown+=("$text${about:+  -- $about}")
        else
            whole+=("$text") whole_shown+=("$text${about:+  -- $about}")
        fi
    done
    if (( ! $#whole && ! $#open )); then
        compset -P '*='
        _files
        return
    fi
    # -U: quantexp chose the words; a part of a run's name stands for the whole.
    (( $#whole )) && compadd -U -l -d whole_shown -a whole
    (( $#open )) && compadd -U -l -S '' -d open_shown -a open
    return 0
}
compdef _quantexp quantexp
