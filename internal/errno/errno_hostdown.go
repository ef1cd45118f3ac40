//go:build !plan9 && !wasip1

package errno

import "syscall"

const hostDown = syscall.EHOSTDOWN
