package errno

import "syscall"

// hostDown is a number that wasip1 has: it has none for this.
const hostDown = syscall.EHOSTUNREACH
