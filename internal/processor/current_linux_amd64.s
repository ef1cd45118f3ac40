#include "textflag.h"

// func segmentLimit() (limit uint32, ok bool)
TEXT ·segmentLimit(SB), NOSPLIT, $0-5
	MOVL $0x7b, CX // the segment's index in the GDT is 15, and user mode has the privilege 3
	XORL AX, AX
	LSLL CX, AX
	SETEQ ok+4(FP)
	MOVL AX, limit+0(FP)
	RET
