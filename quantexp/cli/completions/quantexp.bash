# Completion of quantexp in bash: eval "$(quantexp completion bash)"
_quantexp() {
    local line=${COMP_LINE:0:COMP_POINT} breaks=${COMP_WORDBREAKS//[^=:]/} cut="" word text about
    word=${line##*[[:space:]]}
    # bash replaces what follows the last = or : of a word, unless the word is in quotes.
    [[ -n $breaks && $word != [\'\"]* ]] && cut=${word%"${word##*[$breaks]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r text about; do
        COMPREPLY+=("${text#"$cut"}")
        [[ $text == *[=.] ]] && compopt -o nospace 2>/dev/null
    done < <("${COMP_WORDS[0]}" __complete "$line" 2>/dev/null)
}
complete -o default -F _quantexp quantexp
