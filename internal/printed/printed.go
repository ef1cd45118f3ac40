// Package printed lets a type print as one short text, whatever the verb.
//
// Package fmt prints the fields of a struct for every verb that String does not
// serve, %d and %#v for instance, and reads them without their locks. In this
// module such fields hold what peers have sent, or are megabytes long.
package printed

import "fmt"

// Format implements [fmt.Formatter] by text: %q and %x print it in their form, and
// all other verbs as it is. Width, precision and flags count as for a string.
func Format(s fmt.State, verb rune, text string) {
	switch verb {
	case 'q', 'x', 'X':
	default:
		verb = 's'
	}
	_, _ = fmt.Fprintf(s, fmt.FormatString(s, verb), text)
}
